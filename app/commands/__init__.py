"""The bodies of the commands; app/cli.py has their names and flags."""
