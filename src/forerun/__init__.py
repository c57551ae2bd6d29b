from forerun.core.errors import ForerunError
