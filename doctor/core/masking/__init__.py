"""Masks secrets in everything that leaves the doctor: facts, captures, records, reports and messages.

Text is masked twice: when it becomes a fact (collectors, ``postmortem/job_assembly.py``,
``monitor/telemetry/rank_telemetry.py``), and when facts and findings are written to a document or a report
(``core/capture.py``, ``session.py``, messages on stderr). ``text_masking`` finds secrets by their form and by the name
before them, ``variable_masking`` masks variables and command lines, ``documents`` masks whole records and documents.

A new form of token is one line in ``token_formats.py`` and one shape in ``tests/masking/shapes.py``. The tests in
``tests/masking/`` send every shape through every input and output, and check that real logs and verdicts do not change.
Patterns take linear time: they begin with a literal and bound what follows.
"""

from doctor.core.masking.documents import holds_secret, mask_document, mask_record
from doctor.core.masking.secret_names import is_secret_name
from doctor.core.masking.text_masking import REDACTED, mask_text
from doctor.core.masking.variable_masking import LONGEST, mask_command, mask_value, mask_variables, readable

__all__ = [
    "LONGEST",
    "REDACTED",
    "holds_secret",
    "is_secret_name",
    "mask_command",
    "mask_document",
    "mask_record",
    "mask_text",
    "mask_value",
    "mask_variables",
    "readable",
]
