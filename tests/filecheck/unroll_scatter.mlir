// RUN: %opt %s -p 'unroll-scatter{width=2 limit=4}' | %filecheck %s

// Whole blocks are scattered from a vector, cell after cell; the last block keeps the loop.

func.func @loop(%start: i64, %stop: i64, %map: memref<?xi32>, %y: memref<?xf64>) {
  %values = memref.alloca() {alignment = 64 : i64} : memref<1x2xf64>
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  scf.for %block = %first to %end step %c2 {
    %rest = arith.subi %end, %block : index
    %last = arith.minsi %rest, %c2 : index
    %begin = arith.subi %block, %block : index
    scf.for %cell = %begin to %last step %c1 {
      %entity = arith.addi %cell, %block : index
      %target = memref.load %map[%entity] : memref<?xi32>
      %index = arith.index_cast %target : i32 to index
      %value = memref.load %values[%c0, %cell] : memref<1x2xf64>
      %before = memref.load %y[%index] : memref<?xf64>
      %after = arith.addf %before, %value : f64
      memref.store %after, %y[%index] : memref<?xf64>
    }
  }
  func.return
}

// CHECK:       %[[COUNT:.*]] = arith.subi %last, %begin : index
// CHECK:       %[[WHOLE:.*]] = arith.cmpi eq, %[[COUNT]], %{{.*}} : index
// CHECK-NEXT:  scf.if %[[WHOLE]] {
// CHECK:         %[[VECTOR:.*]] = vector.load %values[%{{.*}}, %{{.*}}] : memref<1x2xf64>, vector<2xf64>
// CHECK-NEXT:    vector.extract %[[VECTOR]][0]
// CHECK:         memref.store %{{.*}}, %y[%{{.*}}] : memref<?xf64>
// CHECK:         vector.extract %[[VECTOR]][1]
// CHECK:         memref.store %{{.*}}, %y[%{{.*}}] : memref<?xf64>
// CHECK:       } else {
// CHECK-NEXT:    scf.for %{{.*}} = %begin to %last step %c1 {
// CHECK:           memref.load %values[%c0, %{{.*}}] : memref<1x2xf64>
