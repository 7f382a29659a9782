// `shared_address.cuh`.
#pragma once

#include "../cuda.h"

static u32 shared_address(const void* s_at) { return emulator::address_of(s_at); }
