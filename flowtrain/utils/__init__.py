"""Small helpers that know nothing of training: timing, seeds, plug-ins, threads, serving."""
