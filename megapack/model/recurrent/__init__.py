"""Recurrent layers over packed rows: gated delta nets and Mamba-2.

A recurrent layer sees a sample from its first token on: a short convolution over the last tokens,
and a scan that carries a state. In a packed row both begin anew at each sample. Where samples share
a prefix, or a sample goes on from an earlier row, they begin with what the tokens before have left:
the scan with a state, the convolution with the last inputs.
"""
