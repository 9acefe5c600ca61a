"""Faults made on purpose: break a healthy training and see which alarm goes off.

``healthcheck run --inject nan-grad@120 train.py`` rehearses one's own rules; plugin authors use the
pytest fixture ``inject``. A fault is applied underneath the watch, so that the session sees what it
would see if the training itself were broken.
"""
