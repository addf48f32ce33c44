"""The program of train.py with an import that one host may lack."""

import tokenlib
import train

tokenlib.prepare()
train.main()
