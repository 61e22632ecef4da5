"""Access to the hostile web: allowed addresses, bounded answers, and the main text of a page."""
