from doctor.examining import *  # noqa
from doctor.examining import examine_job as examine, primary_of  # noqa
