"""Holds every call that only some systems have, each in one of these modules, with what takes its
place elsewhere.

    files      flags of open, reads at an offset, rights, the path that an open file has
    folders    folders that are used without their path
    locks      locks of whole files
    libraries  libraries that are loaded
    limits     limits of memory and time of this process, its largest memory
    machine    the memory and the CPUs of the machine
    cgroups    the shares of both that a container has
    signals    the signals that end a program
    children   child processes with a connection

tests/test_portability.py keeps these calls out of all other modules, and runs the package in a
process that lacks them.
"""
