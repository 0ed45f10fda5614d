"""Measure how a fabric adds, name the contract that it obeys, and keep the proof: `bicomm certify fabric`.

fabric       what is asked of a fabric            families     the inputs that tell ways of adding apart
emulate      fabrics in software, for the proof   candidates   what a fabric may turn out to be
measure      the measurement                      search       a window's parameters, found from what is read
verdict      one answer from all ranks            report       that answer as a certificate, and in words
certificate  the file, strictly read              trust        may NVLS run here, and a quick check that it still may
hardware     the switch itself, as a fabric       cli          `bicomm certify fabric | show`
"""
