"""`python -m bicomm.demo`, alone or under torchrun, mpirun or srun."""

from bicomm.demo.run import main

if __name__ == "__main__":
    main()
