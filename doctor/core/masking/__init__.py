"""Masks secrets in everything that leaves the doctor: facts, captures, records, reports and messages.

Text is masked twice: when it becomes a fact (collectors, ``postmortem/job_assembly.py``,
``monitor/telemetry/rank_telemetry.py``), and when facts and findings are written to a document or a report
(``core/capture.py``, ``session.py``, messages on stderr). ``text_masking`` finds secrets by their form and by the name
before them, ``variable_masking`` masks variables and command lines, ``documents`` masks whole records and documents.

A new form of token is one line in ``token_formats.py`` and one shape in ``tests/masking/shapes.py``. The tests in
``tests/masking/`` send every shape through every input and output, and check that real logs and verdicts do not change.
Patterns take linear time: they begin with a literal and bound what follows.
"""

from doctor.core.masking.documents import holds_secret as holds_secret
from doctor.core.masking.documents import mask_document as mask_document
from doctor.core.masking.documents import mask_record as mask_record
from doctor.core.masking.documents import masked_builtins as masked_builtins
from doctor.core.masking.secret_names import is_secret_name as is_secret_name
from doctor.core.masking.text_masking import REDACTED as REDACTED
from doctor.core.masking.text_masking import mask_text as mask_text
from doctor.core.masking.variable_masking import LONGEST as LONGEST
from doctor.core.masking.variable_masking import mask_command as mask_command
from doctor.core.masking.variable_masking import mask_value as mask_value
from doctor.core.masking.variable_masking import mask_variables as mask_variables
from doctor.core.masking.variable_masking import readable as readable
