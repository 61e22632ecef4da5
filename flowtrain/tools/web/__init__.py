"""The web as hostile ground: which addresses may be asked, bounded answers, and the main text of a
page.
"""
