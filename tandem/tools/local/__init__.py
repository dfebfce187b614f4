"""The three services as processes on this machine: chosen, started, waited for, ended."""
