"""A search for two data sets, one record apart, whose releases differ by too much.

``records`` makes pairs, ``search`` tries them, ``cases`` lists the models and loops.
"""
