"""What each command of the command line does; app/cli.py holds their names and flags."""
