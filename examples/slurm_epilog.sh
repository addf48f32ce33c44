#!/usr/bin/env bash
# For those who run the cluster: Epilog=/etc/slurm/slurm_epilog.sh in slurm.conf. After a job, each of its nodes says
# for itself whether the next jobs should do without it, by a file of its name with the date and the reason. It does so
# where the check of the job named it (slurm_full.sbatch), or where a look at the node finds an error. Jobs that leave
# out what was named within a week:
#
#   sbatch --exclude="$(find /shared/rankdoctor/excluded -type f -mtime -7 -printf '%f\n' | paste -sd,)" …
#
# On a file system that all nodes see and root may write to: install -d /shared/rankdoctor/excluded, and for the users
# install -d -m 1777 /shared/rankdoctor/jobs. A node that was mended comes back at once with rm of its file.
#
# slurmd drains a node whose epilog fails, and keeps it from jobs until the epilog has ended: this one ends with 0,
# whatever happened, and within a minute.
shared=${DOCTOR_SHARED:-/shared/rankdoctor}
doctor=${DOCTOR:-/opt/rankdoctor/bin/doctor}
# slurmd gives an empty PATH.
export PATH=/usr/local/bin:/usr/bin:/bin

if [ "${1:-}" != bounded ]; then
    timeout --kill-after=5 55 "$BASH" "$0" bounded
    exit 0
fi

# Whether the job's own check named this host. The list is a user's: it must be his own file, is read as names alone,
# and can only speak of nodes that his job had. scontrol unfolds node[03-07] without asking the controller.
named_by_the_job() {
    local list=$shared/jobs/$SLURM_JOB_ID names
    [ -f "$list" ] && [ ! -L "$list" ] && [ "$(stat -c %u "$list")" = "$SLURM_JOB_UID" ] || return
    names=$(head -c 65536 "$list" | grep -m 1 -xE '[A-Za-z0-9][][A-Za-z0-9.,_-]*') || return
    scontrol show hostnames "$names" | grep -qxF "$(hostname)"
}

# The ids of the errors on this node; none where there are none, or nothing could be seen, which slurmd's log then has.
errors_here() {
    local report code
    report=$("$doctor" check --gather none --select HOST,GPU,NET008,MEM010 --timeout 20 --format github)
    code=$?
    [ "$code" -le 1 ] || printf 'rankdoctor: node not checked, exit code %s\n' "$code" >&2
    sed -n 's/^::error title=\([A-Z0-9]*\).*/\1/p' <<<"$report" | sort -u | paste -sd' '
}

if named_by_the_job; then
    why="named by the check of job $SLURM_JOB_ID"
elif errors=$(errors_here) && [ -n "$errors" ]; then
    why="$errors after job $SLURM_JOB_ID"
else
    exit 0
fi
# Whole or not at all, for those who read it meanwhile.
printf '%s %s\n' "$(date -u +%FT%TZ)" "$why" >"$shared/.$SLURMD_NODENAME" &&
    mv "$shared/.$SLURMD_NODENAME" "$shared/excluded/$SLURMD_NODENAME"
