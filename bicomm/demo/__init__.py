"""The demo: real ranks combine the output of an MoE layer in every mode, and count the bits that differ.

make demo                               eight ranks on this machine
NPROC=3 launch/torchrun.sh              three
python -m bicomm.demo                   one process alone
"""
