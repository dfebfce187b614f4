"""Scorers with the weights of a model that serves: parts of it and few keys of long texts, which
draft for it, and layers that overlap."""
