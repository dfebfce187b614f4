"""How many replicas a load needs: from what was measured, by simulation of its queues."""
