"""Methods that draft what the target itself predicted in the last round."""
