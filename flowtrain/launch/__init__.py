"""A run on several hosts from one plan: started over SSH, or printed for a scheduler."""
