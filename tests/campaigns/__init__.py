"""Campaigns: thousands of seeded tries with damaged inputs and interrupted writes.

The suite makes a few of each (`test_campaigns.py`); `make campaign` makes a hundred times as many and prints a table.
A module of this package that has `CAMPAIGNS`, a tuple of `Campaign`, takes part.
"""
