"""Load models, check them, and equip their layers for token trees."""
