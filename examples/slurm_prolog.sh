#!/usr/bin/env bash
# For those who run the cluster: Prolog=/etc/slurm/slurm_prolog.sh in slurm.conf, with PrologFlags=Alloc. It looks at
# the node before a job starts there. slurmd drains a node whose prolog ends with anything but 0: only a finding (exit
# code 1) may do that. A command that failed (2), facts that could not be seen (3) or a doctor that is not installed
# leave a line in slurmd's log, and the job runs.
#
# slurmd gives the prolog an empty PATH: name the command whole.
doctor=${DOCTOR:-/opt/rankdoctor/bin/doctor}

report=$("$doctor" check --gather none --select HOST,GPU,NET008,MEM010 --quiet --timeout 20 2>&1)
code=$?
# What slurmd keeps of it is in its log, on the node.
case $code in
    0) exit 0 ;;
    1) printf '%s\n' "$report" >&2; exit 1 ;;
    *) printf 'rankdoctor: node not checked, exit code %s: %s\n' "$code" "${report##*$'\n'}" >&2 ;;
esac
exit 0
