"""What must appear nowhere: secrets in any output; who and where, in output that is redacted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.faults.settings_scenes import interface
from tests.faults.stage import DOCTOR, CannotPlay, require_namespaces, run_shell

USER, HOST, PROJECT = "quintessa", "zebrafish-42", "run"
ADDRESSES = ("10.113.7.5", "fd42:113:7::5")
MAC = "02:ab:cd:ef:13:37"

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz012345",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "NCCL_FAKE_PASSWORD": "correct-horse-battery",
    "TORCH_FAKE_SECRET": "staple-of-horses",
    "PYTORCH_TOKEN": "tok-9f8e7d6c5b4a",
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJxIn0.c2lnbmF0dXJl",
    "RAY_REDIS_PASSWORD": "redis-pass-7731",
}
ADDRESS_WITH_PASSWORD = "http://proxyuser:pr0xy-pa55@proxy.example.org:3128"
HIDDEN = (*SECRETS.values(), "pr0xy-pa55")
VARIABLES = {
    **SECRETS,
    "http_proxy": ADDRESS_WITH_PASSWORD,
    "NCCL_PROXY_URL": ADDRESS_WITH_PASSWORD,
    "FI_PROXY": ADDRESS_WITH_PASSWORD,
    "MASTER_ADDR": HOST,
    "MASTER_PORT": "29500",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_TOPO_FILE": f"/home/{USER}/{PROJECT}/topology.xml",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"/home/{USER}/{PROJECT}/dumps/rank_",
    "NCCL_DEBUG_FILE": f"/home/{USER}/{PROJECT}/nccl.%h.log",
    "VIRTUAL_ENV": f"/home/{USER}/venv",
    "USER": USER,
    "LOGNAME": USER,
    "HOME": f"/home/{USER}",
}
SETUP = f"""
hostname {HOST}
printf '127.0.0.1 localhost\\n{ADDRESSES[0]} {HOST}.corp.example.org {HOST}\\n' > names; mount --bind names /etc/hosts
echo 0f1e2d3c4b5a69788796a5b4c3d2e1f0 > id; mount --bind id /etc/machine-id
mount -t tmpfs home /home; mkdir -p /home/{USER}/{PROJECT}/dumps
{interface("eth0", f"{ADDRESSES[0]}/24")}; ip addr add {ADDRESSES[1]}/64 dev eth0; ip link set eth0 address {MAC}
echo 'NCCL_IB_TIMEOUT=22' > /home/{USER}/.nccl.conf
python -c "import socket, time; s = socket.create_server(('0.0.0.0', 29500)); time.sleep(30)" \\
  --password hunter2-in-argv /home/{USER}/{PROJECT}/train.py &
LISTENER=$!
while ! grep -qi ':733C 0*:0000 0A' /proc/net/tcp; do sleep 0.02; done
"""
COMMANDS = {
    "check as JSON": "check --format json",
    "check as text": "check --verbose",
    "check as Markdown": "check --format markdown",
    "check as JUnit": "check --format junit",
    "capture": "capture",
}


def said(command: str, folder: Path) -> str:
    """stdout and stderr of ``command`` on a host full of names and secrets."""
    try:
        require_namespaces()
    except CannotPlay as why:
        pytest.skip(str(why))
    exports = "".join(f"export {name}='{value}'\n" for name, value in VARIABLES.items())
    script = f"mount -t sysfs none /sys; ip link set lo up\n{SETUP}\n{exports}{DOCTOR} {command}; kill $LISTENER"
    spaces = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    done: subprocess.CompletedProcess[str] = run_shell(script, folder, spaces)
    assert done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_no_secret_appears_anywhere(name: str, tmp_path: Path) -> None:
    text = said(COMMANDS[name], tmp_path)
    assert [secret for secret in (*HIDDEN, "hunter2-in-argv") if secret in text] == []
    assert HOST in text  # without --redact the report is for its owner


@pytest.mark.parametrize("name", COMMANDS)
def test_redacted_output_names_nobody(name: str, tmp_path: Path) -> None:
    text = said(f"{COMMANDS[name]} --redact", tmp_path)
    names = (USER, HOST, *ADDRESSES, MAC, "10.113.7.", "fd42:113:7", "corp.example.org", "0f1e2d3c4b5a6978")
    assert [word for word in (*names, *HIDDEN, "hunter2-in-argv") if word.lower() in text.lower()] == []


def test_a_redacted_capture_is_judged_like_the_original(tmp_path: Path) -> None:
    verdicts = []
    for option in ("", " --redact"):
        (folder := tmp_path / f"run{len(verdicts)}").mkdir()
        document = folder / "capture.json"
        document.write_text(said(f"capture{option} 2>/dev/null", folder))
        done = run_shell(f"{DOCTOR} diagnose {document} --format json", tmp_path)
        results = json.loads(done.stdout)["results"]
        verdicts.append({result["id"]: (result["status"], result["severity"]) for result in results})
    assert verdicts[0] == verdicts[1]
    assert verdicts[0]["ENV008"] == ("fail", "error")
