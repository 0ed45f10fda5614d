"""How ranks agree on a call: through shared memory within a host, through a store anywhere.

header, signature   what a rank says of the call it enters, on the host and on the device
flags, store        the exchange itself: words in shared memory, keys in the group's store
"""
