"""How many replicas a load needs: a simulation of its queues, from measurements."""
