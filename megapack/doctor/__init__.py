"""`megapack doctor`: what of this machine would hinder a run, and what to set.

diagnosis  runs the probes
probes     versions, libraries, environment
apex       which of the two packages named apex is installed
"""

from megapack.doctor.diagnosis import Diagnosis, diagnose

__all__ = [
    "Diagnosis",
    "diagnose",
]
