"""The schema of a TrainJob, from the CRD of Kubeflow Trainer (Apache-2.0), without descriptions.

``python -m tests.examples.trainjob_schema CRD > tests/data/trainjob-schema-2.3.0.json``, where CRD is
``manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml`` of github.com/kubeflow/trainer at its tag v2.3.0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMA = Path(__file__).parents[1] / "data" / "trainjob-schema-2.3.0.json"
_LEFT_OUT = ("description", "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-map-type")


def schema_of(crd: dict[str, Any]) -> Any:
    """Return the schema of the version that the API server stores; like it, objects have no unknown fields."""
    (version,) = (one for one in crd["spec"]["versions"] if one["storage"])
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return schema


def _strict(part: Any) -> Any:
    if isinstance(part, list):
        return [_strict(one) for one in part]
    if not isinstance(part, dict):
        return part
    kept = {key: value for key, value in part.items() if key not in _LEFT_OUT}
    strict = {key: _strict(value) for key, value in kept.items() if key not in ("properties", "default", "enum")}
    strict |= {key: kept[key] for key in ("default", "enum") if key in kept}
    if "properties" in kept:
        strict["properties"] = {name: _strict(value) for name, value in kept["properties"].items()}
        strict.setdefault("additionalProperties", False)
    return strict


if __name__ == "__main__":
    crd = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    json.dump(schema_of(crd), sys.stdout, separators=(",", ":"), sort_keys=True)
    print()
