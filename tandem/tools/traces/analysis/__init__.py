"""Analysis of traces: which stage owns each instant, figures, reports and comparisons."""
