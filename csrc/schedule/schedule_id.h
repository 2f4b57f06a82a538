#pragma once

#include <cstdint>

namespace dash {

// The schedules by name. Which policy a name stands for depends on the mask and the shape: schedule/policy.h.
enum class ScheduleId : int32_t { naive = 0, descending = 1, shift = 2, symmetric_shift = 3 };

}  // namespace dash
