"""Other training frameworks: functions with their signatures, planned by megapack.

One module per framework, named as it is. None imports its framework.
"""
