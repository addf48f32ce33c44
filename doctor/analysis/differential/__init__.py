"""Differential diagnosis: ranks the causes that a symptom can have.

:func:`doctor.analysis.differential.candidates.candidates_of` starts from the numbers of public cases by symptom and
cause (:mod:`doctor.knowledge.candidate_causes`) and multiplies them by the factors of what the evidence shows.
"""
