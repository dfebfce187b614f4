"""What is measured, a file for each subject; `__main__` has their order."""
