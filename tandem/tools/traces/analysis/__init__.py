"""What traces say: whose each instant is, figures of requests, reports and comparisons."""
