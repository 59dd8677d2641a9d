"""One module per command, with the command's name; see `megapack.cli`.

`arguments` and `costs` have the options that several commands share.
"""
