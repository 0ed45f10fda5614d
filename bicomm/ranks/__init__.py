"""Who the ranks are, before there is a group: what a launcher's environment says, what each process tells of itself.

launchers    torchrun, Open MPI, MPICH, Slurm     peers    a process's place: host, GPU, namespace
rendezvous   how ranks without an address meet    alive    is a process still there
attempt      how they try until all are there
"""
