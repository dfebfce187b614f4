"""What gRPC needs on both sides: lifecycle, channels, statuses, conversions."""
