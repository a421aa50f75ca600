"""The code of the commands. app/cli.py has their names, flags and help texts."""
