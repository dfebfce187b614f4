from tandem.client.asynchronous import AsyncClient as AsyncClient
from tandem.client.blocking import Client as Client
from tandem.client.errors import CallFailed as CallFailed
from tandem.client.errors import Denied as Denied
from tandem.client.errors import Lost as Lost
from tandem.client.errors import Overloaded as Overloaded
from tandem.client.errors import Refused as Refused
from tandem.client.errors import TimedOut as TimedOut
from tandem.client.results import GeneratedRound as GeneratedRound
from tandem.client.results import GeneratedText as GeneratedText
from tandem.client.results import GeneratedToken as GeneratedToken
from tandem.tools.local.local import Local as Local

__version__: str
