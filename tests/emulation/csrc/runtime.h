// What is seen of the library: C functions, by their names.
#pragma once

#define API extern "C" __attribute__((visibility("default")))
