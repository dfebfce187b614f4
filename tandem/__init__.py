"""What more than one Tandem service needs; it knows no service."""
