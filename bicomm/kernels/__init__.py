"""The Triton kernels of a call: one executor a file, kernel on top, launcher below.

ordered, exact, owner, multimem   the sums             gather, broadcast   the dispatch that pulls, the one that pushes
barrier                           between ranks        copy_in             an operand's way into the buffer
arithmetic, addends               what sums share      call                what launches share
"""
