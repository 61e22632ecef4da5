"""What the Python of Harbor runs, by path; nothing here imports flowtrain."""
