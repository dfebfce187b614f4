"""What more than one Tandem service needs; it knows no service."""

__version__ = "0.1.0"
