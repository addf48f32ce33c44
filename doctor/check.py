from doctor.checking import *  # noqa
from doctor.checking import check, Check, FAMILIES  # noqa
