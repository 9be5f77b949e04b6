// Float types that kernels convert at their edges, without torch.
#pragma once

namespace mqa {

enum class FloatType : int { kFloat32, kBFloat16, kFloat16 };

}  // namespace mqa
