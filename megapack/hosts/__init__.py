"""Other training frameworks: functions with their signatures, planned by megapack.

One module per framework, named as it is; the others are what these share. None imports its
framework.
"""
