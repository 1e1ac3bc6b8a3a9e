// RUN: %opt %s -p 'relax-atomics{kind="cuda"}' --print-op-generic | %filecheck %s
// RUN: %opt %s -p 'relax-atomics{kind="hip"}' --print-op-generic | %filecheck %s --check-prefix HIP
// RUN: %opt %s -p 'relax-atomics{kind="cuda"}' --print-op-generic | %iree-opt - > /dev/null

// Sums of real and of whole numbers, and the smaller value, in the order that costs least, visible to the whole GPU.

func.func @loop(%y: memref<?xf64>, %n: memref<?xi32>, %at: index, %value: f64, %count: i32) {
  "memref.atomic_rmw"(%value, %y, %at) <{kind = 0 : i64}> : (f64, memref<?xf64>, index) -> f64
  "memref.atomic_rmw"(%count, %n, %at) <{kind = 1 : i64}> : (i32, memref<?xi32>, index) -> i32
  "memref.atomic_rmw"(%value, %y, %at) <{kind = 9 : i64}> : (f64, memref<?xf64>, index) -> f64
  func.return
}

// CHECK:       %[[ADDRESS:.*]] = "memref.extract_aligned_pointer_as_index"(%y)
// CHECK-NEXT:  %[[NUMBER:.*]] = "arith.index_cast"(%[[ADDRESS]]) : (index) -> i64
// CHECK-NEXT:  %[[START:.*]] = "llvm.inttoptr"(%[[NUMBER]]) : (i64) -> !llvm.ptr<1>
// CHECK-NEXT:  %[[INDEX:.*]] = "arith.index_cast"(%at) : (index) -> i64
// CHECK-NEXT:  %[[PLACE:.*]] = "llvm.getelementptr"(%[[START]], %[[INDEX]]) <{{.*}}elem_type = f64
// CHECK-NEXT:  "llvm.atomicrmw"(%[[PLACE]], %value) <{bin_op = 11 : i64, ordering = 2 : i64, syncscope = "device"}> : (!llvm.ptr<1>, f64) -> f64
// CHECK:       "llvm.atomicrmw"(%{{.*}}, %count) <{bin_op = 1 : i64, ordering = 2 : i64, syncscope = "device"}> : (!llvm.ptr<1>, i32) -> i32
// CHECK:       "llvm.atomicrmw"(%{{.*}}, %value) <{bin_op = 14 : i64
// CHECK-NOT:   memref.atomic_rmw

// HIP-COUNT-3: "llvm.atomicrmw"{{.*}}syncscope = "agent"{{.*}}no_fine_grained_memory
