"""Other libraries' ways into the engine. Each module needs its library, which `pip install infinity[integrations]`
installs.
"""
