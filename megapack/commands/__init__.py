"""One module per command, named as the command is; see `megapack.cli`."""
