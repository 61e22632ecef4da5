"""The Python of Harbor runs this package by path; nothing here imports flowtrain."""
