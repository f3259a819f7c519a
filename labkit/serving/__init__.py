"""Many requests on one engine: queues, schedulers, arrivals, figures, and the HTTP door."""

from labkit.serving.schedulers import ChunkedPrefill, Continuous, Static
from labkit.serving.service import Service, TooBusy

__all__ = ["ChunkedPrefill", "Continuous", "Service", "Static", "TooBusy"]
